// Package decide makes one decision, and goes on with it after whatever happened.
package decide

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"time"

	_ "embed"

	"github.com/google/uuid"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	encodingproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	pb "example.com/decide/decideoncev1"
)

//go:embed service_config.json
var serviceConfig string

const pollWait = 10 * time.Second

// Answer is what DecideResponse and GetDecisionStatusResponse have in common.
type Answer interface {
	GetStatus() pb.DecisionStatus
	GetDecision() *pb.Decision
	GetProvenance() *pb.Provenance
	GetFailure() *pb.Failure
	GetRetryAfter() *durationpb.Duration
}

// Begin gives the request that the work file holds. Where there is none yet, it makes it with a new key, and keeps it first.
func Begin(workFile, operation string, facts map[string]any) ([]byte, error) {
	kept, err := os.ReadFile(workFile)
	if !errors.Is(err, fs.ErrNotExist) {
		return kept, err
	}
	values, err := structpb.NewStruct(facts)
	if err != nil {
		return nil, err
	}
	request, err := proto.Marshal(&pb.DecideRequest{Operation: operation, OperationKey: uuid.NewString(), Facts: values})
	if err != nil {
		return nil, err
	}
	return request, keep(workFile, request)
}

func keep(workFile string, request []byte) error {
	file, err := os.Create(workFile + ".new")
	if err != nil {
		return err
	}
	defer file.Close()
	if _, err := file.Write(request); err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return err
	}
	return os.Rename(file.Name(), workFile)
}

// Finish asks until there is an answer that is final, or ctx, which has a deadline, is done. It gives the last error
// where time runs out or asking can't help.
func Finish(ctx context.Context, conn *grpc.ClientConn, token string, request []byte) (Answer, error) {
	end, _ := ctx.Deadline()
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	var sent pb.DecideRequest
	if err := proto.Unmarshal(request, &sent); err != nil {
		return nil, err
	}
	statusRequest := &pb.GetDecisionStatusRequest{
		Operation: sent.Operation, OperationKey: sent.OperationKey, MaxWait: durationpb.New(pollWait),
	}
	isProcessing, failures := false, 0
	for {
		answer, err := ask(ctx, conn, request, statusRequest, isProcessing)
		var pause time.Duration
		if err != nil {
			told, helps := RetryAfter(err)
			failures++
			pause = told + rand.N(min(2*time.Second, 100*time.Millisecond<<failures))
			if !helps || time.Now().Add(pause).After(end) {
				return nil, err
			}
		} else {
			isProcessing = answer.GetStatus() == pb.DecisionStatus_DECISION_STATUS_PROCESSING
			if !isProcessing && answer.GetStatus() != pb.DecisionStatus_DECISION_STATUS_FAILED_RETRYABLE {
				return answer, nil
			}
			failures = 0
			pause = answer.GetRetryAfter().AsDuration()
			if time.Now().Add(pause).After(end) {
				return answer, nil
			}
		}
		time.Sleep(pause)
	}
}

func ask(
	ctx context.Context, conn *grpc.ClientConn, request []byte, statusRequest *pb.GetDecisionStatusRequest, isProcessing bool,
) (Answer, error) {
	if isProcessing {
		return pb.NewDecisionServiceClient(conn).GetDecisionStatus(ctx, statusRequest)
	}
	var answer pb.DecideResponse
	err := conn.Invoke(ctx, pb.DecisionService_Decide_FullMethodName, request, &answer, grpc.ForceCodecV2(keptCodec{}))
	return &answer, err
}

// RetryAfter tells how long to wait before the same is sent again, and whether sending it again can help.
func RetryAfter(err error) (time.Duration, bool) {
	failed := status.Convert(err)
	for _, detail := range failed.Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			return info.GetRetryDelay().AsDuration(), true
		}
	}
	// gRPC's own: a connection was lost, or a call took too long. The decision may have been made.
	return 0, failed.Code() == codes.Unavailable || failed.Code() == codes.DeadlineExceeded
}

// keptCodec sends the very bytes that were kept: marshalling a message again may order a map's members anew.
type keptCodec struct{}

func (keptCodec) Name() string { return encodingproto.Name }

func (keptCodec) Marshal(request any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(request.([]byte))}, nil
}

func (keptCodec) Unmarshal(data mem.BufferSlice, answer any) error {
	return encoding.GetCodecV2(encodingproto.Name).Unmarshal(data, answer)
}

// Connect connects as the environment says, with the service config.
func Connect(options ...grpc.DialOption) (*grpc.ClientConn, error) {
	server := os.Getenv("DECIDEONCE_SERVER")
	if server == "" {
		server = "127.0.0.1:50051"
	}
	transport := insecure.NewCredentials()
	if authority := os.Getenv("DECIDEONCE_TLS_CA"); authority != "" {
		var err error
		if transport, err = credentials.NewClientTLSFromFile(authority, ""); err != nil {
			return nil, err
		}
	}
	options = append(options, grpc.WithDefaultServiceConfig(serviceConfig), grpc.WithTransportCredentials(transport))
	return grpc.NewClient(server, options...)
}
