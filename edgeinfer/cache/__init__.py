"""What has been computed already: a tree of what the KV cache holds. Decides and returns data; knows no backend."""
