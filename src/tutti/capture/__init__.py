"""Capture: a plain training step becomes one functional graph."""
