UPDATE source SET outcome = 'maybe' WHERE line = 1;
