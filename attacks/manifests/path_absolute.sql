UPDATE shard SET file = '/dev/zero' WHERE id = 0;
