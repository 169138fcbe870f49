"""Recurrent layers on a GPU: their convolution, their state, their gated norm."""
