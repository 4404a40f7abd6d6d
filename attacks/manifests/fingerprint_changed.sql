UPDATE dataset SET fingerprint = '{"target":"other"}';
