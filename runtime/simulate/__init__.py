"""The real scheduler over predicted step times: what a plan's engines give under a traffic."""
