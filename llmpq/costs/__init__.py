"""Times of layers and links, measured or kept, and with which sources they were measured."""
