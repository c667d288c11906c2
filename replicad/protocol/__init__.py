"""The line protocol, deaf and blind: nothing in here opens, sleeps, logs or looks at a clock."""
