"""State of a step, lifted by name: models, optimizers and their slots, gradients."""
