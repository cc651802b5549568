"""From a plain training step to one functional graph."""
