"""Devices, links and topologies as data: one TOML file each, with a source for every figure."""
