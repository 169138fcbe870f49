"""Plans anew while a model runs: a device lost, given, taken or slow."""
