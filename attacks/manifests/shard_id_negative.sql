UPDATE shard SET id = -1 WHERE id = 0;
