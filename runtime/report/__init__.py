"""What a run came to, and how far it is: reports and progress."""
