"""The three workers, each a microservice of its own."""
