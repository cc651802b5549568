"""Random small training steps as Python source: written, played in several ways, made smaller."""
