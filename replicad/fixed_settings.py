"""The settings that each session of ours has, whatever is set for the role, the database or the server.

With them the same row is the same text in every session, today and tomorrow (pages of rows are immutable), SQL text
means the same, and no row is left out in silence. postgres/sql/reader_body.sql has them too: the owner of a reader can
attach settings to it. All other settings are as in a new session of the role: `search_path` and
`default_text_search_config` belong to the meaning of an expression for rows.
"""

from __future__ import annotations

from typing import Final

FIXED: Final = {
    "row_security": "off",  # Postgres then refuses to read where a policy would leave rows out
    # how values become text
    "TimeZone": "UTC",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",  # the shortest text that is the same number
    "bytea_output": "hex",
    "xmlbinary": "base64",
    "lc_monetary": "C",
    "lc_numeric": "C",
    "lc_time": "C",
    # how text becomes values, and what SQL means
    "xmloption": "content",
    "timezone_abbreviations": "Default",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "standard_conforming_strings": "on",
    "backslash_quote": "safe_encoding",
    "quote_all_identifiers": "off",
    "gin_fuzzy_search_limit": "0",  # else an index gives a random part of the rows
}
