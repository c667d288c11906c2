-- Places that are cities no more.
DELETE FROM cities WHERE id % 97 = 0
