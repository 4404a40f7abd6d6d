UPDATE sample SET id = x'00' WHERE shard = 2;
