DELETE FROM dataset;
