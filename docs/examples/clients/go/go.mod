module example.com/decide

go 1.26

require (
	github.com/google/uuid v1.6.0
	google.golang.org/genproto/googleapis/rpc v0.0.0-20251002232023-7c0ddcbb5797
	google.golang.org/grpc v1.85.0
	google.golang.org/protobuf v1.36.12
)
