"""`replicad streams`: registering streams, looking at them, and mending them."""
