"""From one graph for one device to one program for every rank."""
