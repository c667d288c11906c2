'TimeZone=UTC', 'DateStyle=ISO, MDY', 'IntervalStyle=postgres', 'extra_float_digits=1', 'bytea_output=hex',
        'xmlbinary=base64', 'lc_monetary=C', 'lc_numeric=C', 'lc_time=C', 'xmloption=content', 'array_nulls=on',
        'transform_null_equals=off', 'standard_conforming_strings=on', 'backslash_quote=safe_encoding'
