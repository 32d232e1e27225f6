"""The operations of the model: contracts, reference and fast implementations."""
