UPDATE tensor SET shape = 'x' WHERE dtype = 'BF16';
