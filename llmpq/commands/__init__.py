"""What every command needs: flags, children, output files, addresses."""
