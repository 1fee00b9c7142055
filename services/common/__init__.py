"""What the three workers truly share: the process shell, weights on and off the device, tensors on the wire."""
