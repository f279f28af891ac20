"""Where tensors live."""
