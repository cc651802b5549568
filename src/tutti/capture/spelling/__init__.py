"""One spelling for each thing: rewrites of nodes to a canonical form."""
