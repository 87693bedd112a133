"""Client of decideonce, the service that makes a business decision exactly once."""
