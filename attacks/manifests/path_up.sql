UPDATE shard SET file = '../../etc/passwd' WHERE id = 0;
