"""Encoding and decoding of cache records. Callers use RowFormat and PagedRows, which hold the contracts.

encode_records  values [n, dim] float32 -> uint8 [n, units]: data, then scales
decode_records  uint8 [n, units] -> values [n, dim] float32
write_records   PagedRows, block ids int64 [n], slots int64 [n], values [n, dim]: encode and store
exact           all implementations agree bit for bit
"""
