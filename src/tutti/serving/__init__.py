"""Steps of workers and servers."""
