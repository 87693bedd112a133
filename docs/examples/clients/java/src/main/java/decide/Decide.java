package decide;

import com.google.gson.Gson;
import com.google.protobuf.ByteString;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.Struct;
import com.google.protobuf.util.Durations;
import com.google.protobuf.util.JsonFormat;
import com.google.rpc.RetryInfo;
import decideonce.v1.DecisionServiceGrpc;
import decideonce.v1.DecisionServiceGrpc.DecisionServiceBlockingStub;
import decideonce.v1.DecisionServiceOuterClass.DecideRequest;
import decideonce.v1.DecisionServiceOuterClass.DecideResponse;
import decideonce.v1.DecisionServiceOuterClass.DecisionStatus;
import decideonce.v1.DecisionServiceOuterClass.GetDecisionStatusRequest;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.Reader;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.util.Map;
import java.util.Optional;
import java.util.UUID;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/** Makes one decision, and goes on with it after whatever happened: WORK_FILE OPERATION FACTS_JSON. */
public final class Decide {
  private static final long WITHIN_MS = 60_000;
  private static final Duration POLL_WAIT = Durations.fromSeconds(10);
  /** Of sysexits.h: a temporary failure, try again. */
  private static final int EX_TEMPFAIL = 75;

  private Decide() {}

  /** Gives the request that the work file holds. Where there is none yet: makes it with a new key, and keeps it first. */
  static ByteString begin(Path workFile, String operation, String facts) throws IOException {
    if (!Files.exists(workFile)) {
      Struct.Builder values = Struct.newBuilder();
      JsonFormat.parser().merge(facts, values);
      DecideRequest request = DecideRequest.newBuilder()
          .setOperation(operation)
          .setOperationKey(UUID.randomUUID().toString())
          .setFacts(values)
          .build();
      Path unfinished = Path.of(workFile + ".new");
      try (FileChannel file = FileChannel.open(unfinished,
          StandardOpenOption.CREATE, StandardOpenOption.TRUNCATE_EXISTING, StandardOpenOption.WRITE)) {
        file.write(ByteBuffer.wrap(request.toByteArray()));
        file.force(true);
      }
      Files.move(unfinished, workFile, StandardCopyOption.ATOMIC_MOVE);
    }
    return ByteString.copyFrom(Files.readAllBytes(workFile));
  }

  /**
   * Asks until there is an answer that is final.
   *
   * @throws StatusRuntimeException the last error, where time runs out or asking can't help
   */
  public static DecideResponse finish(Channel channel, String token, ByteString kept, long withinMs)
      throws InterruptedException, InvalidProtocolBufferException {
    long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(withinMs);
    DecisionServiceBlockingStub stub = authorized(DecisionServiceGrpc.newBlockingStub(channel), token);
    // Messages don't change, and a map's members keep their order: the bytes are those that were kept.
    DecideRequest request = DecideRequest.parseFrom(kept);
    GetDecisionStatusRequest statusRequest = GetDecisionStatusRequest.newBuilder()
        .setOperation(request.getOperation())
        .setOperationKey(request.getOperationKey())
        .setMaxWait(POLL_WAIT)
        .build();
    boolean isProcessing = false;
    int failures = 0;
    while (true) {
      long pauseMs;
      try {
        DecisionServiceBlockingStub timed = stub.withDeadlineAfter(end - System.nanoTime(), TimeUnit.NANOSECONDS);
        // The two answers have the same fields.
        DecideResponse answer = isProcessing
            ? DecideResponse.parseFrom(timed.getDecisionStatus(statusRequest).toByteString())
            : timed.decide(request);
        isProcessing = answer.getStatus() == DecisionStatus.DECISION_STATUS_PROCESSING;
        boolean isFinal = !isProcessing && answer.getStatus() != DecisionStatus.DECISION_STATUS_FAILED_RETRYABLE;
        pauseMs = Durations.toMillis(answer.getRetryAfter());
        if (isFinal || isPast(end, pauseMs)) {
          return answer;
        }
        failures = 0;
      } catch (StatusRuntimeException error) {
        Optional<Duration> told = retryAfter(error);
        failures++;
        pauseMs = told.map(Durations::toMillis).orElse(0L)
            + ThreadLocalRandom.current().nextLong(Math.min(2_000, 100L << Math.min(failures, 5)));
        if (told.isEmpty() || isPast(end, pauseMs)) {
          throw error;
        }
      }
      Thread.sleep(pauseMs);
    }
  }

  private static boolean isPast(long end, long pauseMs) {
    return System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(pauseMs) - end > 0;
  }

  /** Tells how long to wait before the same is sent again; nothing where sending it again can't help. */
  public static Optional<Duration> retryAfter(StatusRuntimeException error) throws InvalidProtocolBufferException {
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    if (status != null) {
      for (com.google.protobuf.Any detail : status.getDetailsList()) {
        if (detail.is(RetryInfo.class)) {
          return Optional.of(detail.unpack(RetryInfo.class).getRetryDelay());
        }
      }
    }
    // gRPC's own: a connection was lost, or a call took too long. The decision may have been made. Of some connections
    // that are lost grpc-java says UNKNOWN (its issue 10120); the service never does.
    return switch (error.getStatus().getCode()) {
      case UNAVAILABLE, DEADLINE_EXCEEDED, UNKNOWN -> Optional.of(Durations.ZERO);
      default -> Optional.empty();
    };
  }

  /** Gives a stub that sends a token. */
  public static DecisionServiceBlockingStub authorized(DecisionServiceBlockingStub stub, String token) {
    Metadata headers = new Metadata();
    headers.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + token);
    return stub.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
  }

  /** Connects as the environment says, with the service config. */
  public static ManagedChannel connect() throws IOException {
    String server = System.getenv().getOrDefault("DECIDEONCE_SERVER", "127.0.0.1:50051");
    String authority = System.getenv("DECIDEONCE_TLS_CA");
    ChannelCredentials credentials = authority == null
        ? InsecureChannelCredentials.create()
        : TlsChannelCredentials.newBuilder().trustManager(new File(authority)).build();
    return Grpc.newChannelBuilder(server, credentials).defaultServiceConfig(serviceConfig()).build();
  }

  private static Map<String, ?> serviceConfig() throws IOException {
    try (Reader text =
        new InputStreamReader(Decide.class.getResourceAsStream("/service_config.json"), StandardCharsets.UTF_8)) {
      @SuppressWarnings("unchecked")
      Map<String, ?> config = new Gson().fromJson(text, Map.class);
      return config;
    }
  }

  /** Prints the outcome, and exits with EX_TEMPFAIL where the same command is to be run again. */
  public static void main(String[] arguments) throws IOException, InterruptedException {
    ByteString request = begin(Path.of(arguments[0]), arguments[1], arguments[2]);
    ManagedChannel channel = connect();
    int code;
    try {
      code = tell(finish(channel, System.getenv("DECIDEONCE_TOKEN"), request, WITHIN_MS));
    } catch (StatusRuntimeException error) {
      System.err.println(error.getMessage());
      code = retryAfter(error).isPresent() ? EX_TEMPFAIL : 1;
    }
    channel.shutdownNow();
    System.exit(code);
  }

  private static int tell(DecideResponse answer) {
    if (answer.getStatus() == DecisionStatus.DECISION_STATUS_SUCCEEDED) {
      System.out.println(answer.getDecision().getOutcome() + " " + answer.getProvenance().getDecisionId());
      return 0;
    }
    System.err.println(answer.getStatus() + " " + answer.getFailure().getReason());
    return switch (answer.getStatus()) {
      case DECISION_STATUS_PROCESSING, DECISION_STATUS_FAILED_RETRYABLE -> EX_TEMPFAIL;
      default -> 1;
    };
  }
}
