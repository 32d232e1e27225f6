"""Encoding and decoding of cache records. Callers use RowFormat; the contract is in `row_formats`.

encode_records  values [n, dim] float32 -> uint8 [n, units]: data, then scales
decode_records  uint8 [n, units] -> values [n, dim] float32
exact           all implementations agree bit for bit
"""
