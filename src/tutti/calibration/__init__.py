"""Measures this machine for plans and predictions: `tutti calibrate`."""
