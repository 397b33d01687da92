"""LayerZero's functions as torch operators: tracing, lowering into compiled graphs, gradients, vmap and autocast."""
