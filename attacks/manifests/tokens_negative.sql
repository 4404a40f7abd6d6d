UPDATE sample SET tokens = -5 WHERE shard = 0;
