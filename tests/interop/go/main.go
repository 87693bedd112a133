// The interop driver: reads commands as JSON lines, WORKERS at a time on a connection each, and answers with JSON lines.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"log"
	"os"
	"strconv"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	encodingproto "google.golang.org/grpc/encoding/proto"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/decide/decide"
	pb "example.com/decide/decideoncev1"
)

type command struct {
	Id      int     `json:"id"`
	Do      string  `json:"do"`
	Request []byte  `json:"request"`
	WithinS float64 `json:"within_s"`
}

var token = os.Getenv("DECIDEONCE_TOKEN")

func main() {
	workers, err := strconv.Atoi(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	commands, answers := make(chan command), json.NewEncoder(os.Stdout)
	var writing sync.Mutex
	var working sync.WaitGroup
	for range workers {
		conn, err := decide.Connect()
		if err != nil {
			log.Fatal(err)
		}
		working.Go(func() {
			for one := range commands {
				answer := run(conn, one)
				answer["id"] = one.Id
				writing.Lock()
				if err := answers.Encode(answer); err != nil {
					log.Fatal(err)
				}
				writing.Unlock()
			}
		})
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var one command
		if err := json.Unmarshal(lines.Bytes(), &one); err != nil {
			log.Fatal(err)
		}
		commands <- one
	}
	close(commands)
	working.Wait()
}

func run(conn *grpc.ClientConn, one command) map[string]any {
	ctx := metadata.AppendToOutgoingContext(context.Background(), "authorization", "Bearer "+token)
	received := &receivedCodec{}
	client := pb.NewDecisionServiceClient(conn)
	switch one.Do {
	case "decide":
		answer, err := client.Decide(ctx, read(one.Request, &pb.DecideRequest{}), grpc.ForceCodecV2(received))
		return said(answer, err, map[string]any{"replayed": answer.GetReplayed(), "raw": received.data})
	case "status":
		request := read(one.Request, &pb.GetDecisionStatusRequest{})
		answer, err := client.GetDecisionStatus(ctx, request, grpc.ForceCodecV2(received))
		return said(answer, err, map[string]any{"raw": received.data})
	case "finish":
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(one.WithinS*float64(time.Second)))
		defer cancel()
		answer, err := decide.Finish(ctx, conn, token, one.Request)
		return said(answer, err, map[string]any{})
	case "health":
		request := read(one.Request, &healthpb.HealthCheckRequest{})
		answer, err := healthpb.NewHealthClient(conn).Check(ctx, request)
		if err != nil {
			return failed(err)
		}
		return map[string]any{"code": 0, "status": answer.GetStatus().String()}
	}
	panic("no such command: " + one.Do)
}

func read[M proto.Message](data []byte, message M) M {
	if err := proto.Unmarshal(data, message); err != nil {
		log.Fatal(err)
	}
	return message
}

func said(answer decide.Answer, err error, more map[string]any) map[string]any {
	if err != nil {
		return failed(err)
	}
	more["code"] = 0
	more["status"] = answer.GetStatus().String()
	more["outcome"] = answer.GetDecision().GetOutcome()
	more["decision_id"] = answer.GetProvenance().GetDecisionId()
	more["reason"] = answer.GetFailure().GetReason()
	more["retry_after_ms"] = answer.GetRetryAfter().AsDuration().Milliseconds()
	return more
}

func failed(err error) map[string]any {
	converted := status.Convert(err)
	answer := map[string]any{"code": converted.Code(), "message": converted.Message()}
	for _, detail := range converted.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			answer["error"] = map[string]any{"reason": info.Reason, "domain": info.Domain, "metadata": info.Metadata}
		}
	}
	return answer
}

// receivedCodec is protobuf's, and keeps the bytes of the answer as they came.
type receivedCodec struct{ data []byte }

func (*receivedCodec) Name() string { return encodingproto.Name }

func (*receivedCodec) Marshal(request any) (mem.BufferSlice, error) {
	return encoding.GetCodecV2(encodingproto.Name).Marshal(request)
}

func (c *receivedCodec) Unmarshal(data mem.BufferSlice, answer any) error {
	c.data = data.Materialize()
	return encoding.GetCodecV2(encodingproto.Name).Unmarshal(data, answer)
}
