"""`replicad tubes`: making tubes, attaching tables, filling and looking at them."""
