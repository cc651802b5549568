"""The time and memory of one program under one layout, on hardware that is data."""
