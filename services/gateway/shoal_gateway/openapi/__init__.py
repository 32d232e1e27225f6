"""The OpenAPI document: what is accepted and answered over HTTP."""
