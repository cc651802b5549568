"""The ways to train that are compared, one file each; `benchmarks.ways` lists them."""
