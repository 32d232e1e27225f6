"""One folder per operation: the contract, the plain torch reference, the compiled CPU path."""
