package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// The program prints JSON lines, as `replicad conform` wants them:
//
//	go run . follow HOST:PORT STREAM [TOKEN]
//	go run . work HOST:PORT TUBE [PARTITION/PARTITIONS]
func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	words := append(os.Args[1:], "", "", "", "")
	options := Options{Token: words[3], Partition: words[3], Secret: os.Getenv("REPLICAD_TOKEN")}
	options.OnDisconnect = func(err error, _ time.Duration) { fmt.Fprintln(os.Stderr, "replicad.go:", err) }
	text := func(value any) string { found, _ := json.Marshal(value); return string(found) }
	var err error
	switch words[0] {
	case "follow":
		err = Follow(ctx, words[1], words[2], options, func(event Event) error {
			instance := text(event.Instance)
			if event.Reset && event.Instance == "" {
				instance = "null"
			}
			head := fmt.Sprintf(`{"stream":%s,"instance":%s,`, text(event.Stream), instance)
			if event.Reset {
				fmt.Printf("%s\"reset\":%s,\"token\":%s}\n", head, text(event.Reason), text(event.Above))
			}
			for _, row := range event.Rows {
				fmt.Printf("%s\"token\":%d,\"row\":%s}\n", head, event.At, row)
			}
			return nil
		})
	case "work":
		err = Work(ctx, words[1], words[2], options, func(_ context.Context, pod Pod) error {
			fmt.Printf("{\"tube\":%s,\"ids\":%s}\n", text(words[2]), text(pod.IDs))
			return nil
		})
	default:
		err = errors.New("usage: follow HOST:PORT STREAM [TOKEN] | work HOST:PORT TUBE [PARTITION/PARTITIONS]")
	}
	if err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "replicad.go:", err)
		os.Exit(1)
	}
}
