module replicad

go 1.19
