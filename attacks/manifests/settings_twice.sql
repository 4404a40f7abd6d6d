UPDATE dataset SET spec = '{"layers":[1,3],"hidden_size":6,"dtype":"bf16","x":';
