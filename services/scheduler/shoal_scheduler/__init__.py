"""Admission, queueing and placement of requests on decode workers."""
