"""How quick a configuration will be: a model of the machine, and what was found by trying."""
