"""cuDNN's frontend."""
