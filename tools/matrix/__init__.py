"""Makes environments with other releases of the libraries, and runs tests in them."""
