"""Tools for developers: random problems, and plans found by trying everything."""
