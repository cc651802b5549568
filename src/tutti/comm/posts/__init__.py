"""Letters between ranks that outlive each other."""
