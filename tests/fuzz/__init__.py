"""Every parser of untrusted bytes against hostile input: few examples in `make test`, many in `make fuzz`."""
